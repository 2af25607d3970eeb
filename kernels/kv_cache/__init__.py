"""Operation family: kv_cache. Specs are found by walking this package."""
