"""rayapp as a library: what `import rayapp` offers, in scripts and notebooks. The command line is a layer over it."""
