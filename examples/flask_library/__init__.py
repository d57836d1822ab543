"""A lending library on Flask and a scoped session. Start with README.md."""
