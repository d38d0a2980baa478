"""Tests against a real vLLM server. They are run by ``make test-vllm`` alone.

They take minutes and an interpreter that has vLLM; plain ``pytest`` leaves this folder out.
"""
