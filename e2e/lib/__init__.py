"""What scenarios and the demo share: ledger, load, prober, cluster access, reports."""
