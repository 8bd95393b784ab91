"""What a dispatcher and a simulator know of a fleet: requests, engines, replicas and their life."""
