"""The pages: each function reads what one page shows, and returns it for its template and as JSON."""
