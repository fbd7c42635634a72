"""What generation engines share: their interface, requests, sampling."""
