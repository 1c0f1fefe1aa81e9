"""Makes one model of several processes, each with its own part of the experts: who owns what, and how they agree."""
