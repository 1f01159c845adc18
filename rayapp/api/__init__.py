"""rayapp as a library, for scripts and notebooks: the functions that `import rayapp` offers. The CLI uses them too."""
