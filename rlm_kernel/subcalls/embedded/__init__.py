"""The model that comes with rlm-kernel.

endpoint        the model as an endpoint, in a process of its own
server_process  what runs in that process
model_file      its file: got once, checked, cached
"""
