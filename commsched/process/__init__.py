"""The processes of a job: how they start, how they find each other, what happens when one is lost."""
