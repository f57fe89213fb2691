"""Clients of running vLLM, SGLang and llama.cpp servers."""
