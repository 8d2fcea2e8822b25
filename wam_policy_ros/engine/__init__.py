"""Running the model: sessions, caches, sampling. Everything that happened before lives in a session object."""
