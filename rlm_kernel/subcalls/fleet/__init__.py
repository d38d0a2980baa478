"""Several servers of one model.

fleet         all of them as one endpoint
member        one of them: what it is sent, and whether it may be sent anything now
keeper        asks for their health and their queues
journey       the way of a call through them
adaptive      how many requests a server is worth sending at once
"""
