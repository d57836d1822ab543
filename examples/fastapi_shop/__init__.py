"""A shop on FastAPI and AsyncSession, with a worker in its process. Start with README.md."""
