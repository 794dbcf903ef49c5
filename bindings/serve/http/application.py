"""The server of one model with the routes of every API: OpenAI's, llama.cpp's and Ollama's."""

from tamis.bindings.serve.http import llamacpp_routes, ollama_routes
from tamis.bindings.serve.http.app import Server, Settings
from tamis.bindings.serve.http.guard import Log
from tamis.bindings.serve.models import Model


def application(model: Model, settings: Settings, log: Log) -> Server:
    """The server of a loaded model. log: called with a line for each request."""
    return Server(model, settings, log, (llamacpp_routes.routes, ollama_routes.routes))
