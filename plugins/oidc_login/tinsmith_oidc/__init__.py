"""Sign in to a tinsmith server with OpenID Connect."""
