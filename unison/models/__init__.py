"""Model architectures, each written once over ``unison.ops`` and used by rollout and training alike."""
