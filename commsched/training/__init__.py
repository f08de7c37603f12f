"""Training on files, from the first step to a score on test data: what ``commsched train`` runs.

``data_jobs`` makes jobs of folders of images, tables of sentences and masks; ``loop`` trains, evaluates and
writes checkpoints, figures and curves.
"""
