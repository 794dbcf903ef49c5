"""The engine: loaded models, sessions of one sequence, batches of several, and their files."""
