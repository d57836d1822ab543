"""336,776 departures from New York in 2013, published and delivered. Start with README.md."""
