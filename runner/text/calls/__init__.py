"""What reads tool calls off an answer: the text as it comes, and a reader for each format."""
