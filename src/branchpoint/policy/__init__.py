"""Policies: chat formats, models, engines."""
