"""One OpenAI-compatible server.

openai_http   the server as an endpoint
connection    HTTP to it
server_kind   what it is, as far as it says so, and how much it can do at once
prometheus    the format in which it tells the latter
context       whether a prompt fits, before it is sent
wire          what it is sent and sends, as types
tool_wire     the part of that which is about tools
structured    the part which is about typed replies
replies       what a completion is worth
refusals      its errors as sentences, without keys
sse           server-sent events, for replies that are streamed
"""
