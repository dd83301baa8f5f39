"""A BERT-style encoder that classifies a text by its first token, and loads BERT checkpoints of Hugging Face."""
