"""HTTP servers with the interfaces of OpenAI and Anthropic; generation engines as a service."""
