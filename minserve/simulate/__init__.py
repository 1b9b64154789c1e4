"""The same engine on a virtual clock: a cost model says what each step would take."""
