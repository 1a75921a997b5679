"""Read what other tools' files say of a job: Hugging Face's `config.json`, Megatron's flags."""
