"""The interfaces of OpenAI and Anthropic: request bodies to one form of request, and responses to bodies and events."""
