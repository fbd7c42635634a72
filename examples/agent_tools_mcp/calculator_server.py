"""An MCP server with a calculator: over standard input and output, or over HTTP with ``--port N``."""

import argparse
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

sys.path.append(str(Path(__file__).parents[1] / "tiny_agentic"))
from games import calculate as value_of

server = MCPServer("calculator", log_level="WARNING")


@server.tool()
def calculate(expression: str) -> str:
    """Calculate an expression of whole numbers with + - * and brackets."""
    try:
        return str(value_of(expression))
    except ValueError as error:
        raise ToolError(str(error)) from None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    port = parser.parse_args().port
    if port:
        server.run(transport="streamable-http", host="127.0.0.1", port=port)
    else:
        server.run(transport="stdio")
