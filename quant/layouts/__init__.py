"""Weight layouts, one spec a module. Found by walking this package."""
