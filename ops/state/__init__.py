"""State on disk and between formats: files, resharding, conversion, comparison."""
