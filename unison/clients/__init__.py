"""EngineClients for servers, and the servers that a run starts."""
