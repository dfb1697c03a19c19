//! Verbs that a gateway's API has nothing for: each with a sentence on what to do instead.

use crate::cli::{SnapshotVerb, TemplateVerb, Verb, VolumeVerb};

/// What to do instead of a verb that cannot be had, if it cannot.
pub(super) fn sentence(verb: &Verb) -> Option<String> {
    let (what, instead) = match verb {
        Verb::Start(_) | Verb::Restart(_) => (
            "starting a sandbox again",
            "of one that has ended nothing is kept there; suspend it with `basalt suspend`, and `basalt resume` lets it go on",
        ),
        Verb::Stop(_) => (
            "stopping a sandbox",
            "of one that has ended nothing is kept there; suspend it with `basalt suspend`, or remove it with `basalt rm --force`",
        ),
        Verb::Pause(_) => (
            "stopping virtual CPUs alone",
            "`basalt suspend` saves its memory, too, and `basalt resume` lets it go on",
        ),
        Verb::Wait(_) => (
            "waiting for a sandbox's end",
            "sandboxes there have no command of their own; run one that is waited for with `basalt exec`",
        ),
        Verb::Prune(_) => (
            "pruning",
            "of sandboxes that have ended nothing is kept there; `basalt ps` lists those that are there",
        ),
        Verb::Events => ("events", "ask with `basalt ps`, or use the page of the gateway (/ui/)"),
        Verb::Rollback(_) => (
            "rolling a sandbox back",
            "make another one of the snapshot with `basalt clone`, and remove the first",
        ),
        Verb::Snapshot(SnapshotVerb::Inspect(_)) => (
            "inspecting a snapshot",
            "`basalt snapshot ls --json` has all that is told there",
        ),
        Verb::Template(TemplateVerb::Inspect(_)) => (
            "inspecting a template",
            "`basalt template ls --json` has all that is told there",
        ),
        Verb::Volume(VolumeVerb::Inspect(_)) => (
            "inspecting a volume",
            "`basalt volume ls --json` has all that is told there",
        ),
        Verb::Template(TemplateVerb::Build(_)) => (
            "building a template",
            "build it with the SDK (docs/how-to/own-template.md), or with `basalt` on the gateway's own machine",
        ),
        Verb::Snapshot(SnapshotVerb::Verify(_) | SnapshotVerb::Files(_))
        | Verb::Template(TemplateVerb::Verify(_) | TemplateVerb::Prune(_) | TemplateVerb::Files(_))
        | Verb::Volume(VolumeVerb::Prune)
        | Verb::Update(_)
        | Verb::Move(_)
        | Verb::Host(_)
        | Verb::Device(_)
        | Verb::Accel(_)
        | Verb::Daemon(_) => (
            "what concerns the node itself, or a machine's hardware,",
            "use `basalt` on the gateway's own machine",
        ),
        Verb::Images
        | Verb::Pull(_)
        | Verb::Push(_)
        | Verb::Tag(_)
        | Verb::Save(_)
        | Verb::Import(_)
        | Verb::Rmi(_)
        | Verb::Image(_)
        | Verb::System(_) => (
            "images",
            "leave --host out (and BASALT_HOST unset) for those of this machine; those of the gateway's are its operator's",
        ),
        _ => return None,
    };
    Some(format!("{what} cannot be had over --host: {instead}"))
}
