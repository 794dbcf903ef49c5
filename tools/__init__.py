"""Command-line tools that report on models, speed and quality."""
