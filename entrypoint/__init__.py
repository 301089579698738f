"""Inside the container, before and around vLLM: facts, plan, preparation, serving."""
