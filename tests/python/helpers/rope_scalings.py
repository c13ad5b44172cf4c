"""A configuration of each scaling of rotary frequencies that transformers has."""

SCALINGS = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-bounds": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
                    "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.25},
    "yarn-deepseek": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707,
                      "original_max_position_embeddings": 4096, "truncate": False},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}  # fmt: skip
