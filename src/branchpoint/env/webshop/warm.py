"""Importing this module gets a process ready for WebShop: products and goals read, the search index built, packages
imported.

``ForkServer(preload=("branchpoint.env.webshop.warm",))`` does it once for all environments that are forked from there.
"""

from branchpoint.env.webshop import preload

preload()
