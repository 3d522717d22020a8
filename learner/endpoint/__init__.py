"""The head's outer door for generation: vLLM's and OpenAI's routes over HTTP, in front of `learner.requests`."""
