"""What ``unison check`` runs: proofs of the system's promises on the machine at hand."""
