"""Choosing: enumerate candidates, order them by precedence and cost, say why."""
