"""What `tamis bench` and `tamis perplexity` measure: time and prediction of attention methods."""
