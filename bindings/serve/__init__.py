"""An HTTP server with OpenAI's API over one engine: `tamis serve` and what it is made of."""
