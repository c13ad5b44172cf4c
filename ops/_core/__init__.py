"""Parts that the packages of Headroom share. Nothing here is public."""
