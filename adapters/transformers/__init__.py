"""The embedded engine: a small OpenAI-compatible server on Hugging Face Transformers."""
