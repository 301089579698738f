"""One real token through the OpenAI API: tells booting from dead and busy from hung."""
