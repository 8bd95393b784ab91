"""Xiong et al.: throughput estimated, tensor-parallel degrees searched machine by machine."""
