"""Random programs of ordinary user actions, compared with plain PyTorch on averaged gradients.

The rule: any sequence of ordinary actions gives what plain PyTorch with averaged gradients gives, or an error
at that action that names the way out. Never another number, never a hang.

    python -m tests.checker --programs 20000 --jobs 2              # ranks are threads; prints the seeds
    python -m tests.checker --programs 3000 --processes            # real ranks, over the real transports
    python -m tests.checker --programs 500 --processes --ranks 3
    python -m tests.checker --programs 500 --processes --ranks 4 --hosts 2    # two hosts, says the launcher
    python -m tests.checker --replay SEED --shrink                 # one program, reduced to what matters

What plain PyTorch with averaged gradients does (``plain.py``):

- Each rank runs the same actions on batches of its own. A whole backward that gives a gradient on every rank,
  outside of ``no_sync()``, replaces every gradient of the optimizer by its mean over the ranks; None counts
  as zeros, None on all ranks stays None. With ``backward_passes_per_step=k`` the k-th such backward does it.
- Under ``no_sync()``, in passes before the k-th and in a backward that raised, gradients stay in ``p.grad``
  as plain torch leaves them on that rank. ``step()`` and ``synchronize()`` first average whatever has been
  accumulated since. ``step()`` and ``zero_grad()`` begin a new count of passes.
- ``op=Sum``: what has been summed is not summed again, only what was added since.
- What the user does to parameters, gradients and modules means what it means in plain torch.
- ``gather="parameters"``: gradients can be read after ``synchronize()``; after ``step()`` they are gone.

Left out, because no rank could know what the others do: a rank without a backward that calls neither
``step()`` nor ``synchronize()``; one whose backward raised before its first gradient; one that skips a
backward where the others add a second one to gradients that are averaged already; with ``op=Sum``, other
changes of gradients than those right after the sum.

Which action found which fault of an earlier core, each seen there in a program of one to five actions:

    change_grads data, set_; to_format    p.grad was cut off its bucket, and ranks trained apart
    failing_backward, failing_rank        the failed batch's gradients were added to the next one's, or a hang
    no_sync after a backward, step        gradients under no_sync() were lost
    change_params vector, data; tie_data  with shards: writes to the parameters' memory were lost, ties undone
    clear_grads none; copies_of deepcopy  with shards: an error, though no value was needed
    model_state size                      with shards: a part's state was saved with the whole flat buffer
    trace, use_traced                     a traced model read old weights
    script_part; other_model script       scripting failed, as did wrapping a ScriptModule
    keep_old_grads, add_by_hand           references to old gradients showed new ones
    add_hook log                          a hook after accumulation saw no gradient
    evaluate inference_mode               an error with op=Sum
    wrap_again on a default device        an error
    other_model complex                   an error deep in the engine
    copies_of optimizer                   the optimizer could not be pickled

And later, each in one of thousands of programs:

    failing_update, backward              a rank whose update raised in step() counted as not having stepped
    failing_update with shards            the other ranks waited for shards, or a bucket was sent twice
    backward_inputs, no_sync, clear_grads zeros were None where only a local backward had computed a gradient
    freeze, join, step (on real ranks)    ranks left frozen parameters out of the plan at different steps
    change_grads, backward_inputs, Sum    a changed sum to which nothing was added was lost
    backward, add_group, synchronize      the passes before were forgotten, and the last one stayed local

The files: ``actions`` (what users do, each once), ``models`` (tiny nets and their data), ``plain`` (the
oracle), ``world`` (one rank of a program), ``programs`` (draw, run, compare, shrink), ``allowed`` (the listed
errors), ``distributed`` (how a rank makes its optimizers), ``threads`` and ``processes`` (what ranks are).
``stages`` and ``tiles`` are checkers of their own, for pipelines and for tiles (of the models in ``layers``);
``command`` is their command, and ``seeds`` runs their programs on real ranks. ``races`` runs programs of all
three under torch's race detector.
"""
