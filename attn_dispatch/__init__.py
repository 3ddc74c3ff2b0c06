"""Write attention once."""
