//! The steps that use Basalt itself: images into its store, the lab up, and a first sandbox that has to answer.
//!
//! Calls the programs as a person would; knows none of their insides.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Finished, Plan, Report, Step, Task};

/// Importing unpacks a few hundred megabytes at most.
const IMPORT_LIMIT: Duration = Duration::from_secs(10 * 60);
/// The emulated host boots in well under a minute; twice, if it has to be tried again.
const LAB_LIMIT: Duration = Duration::from_secs(5 * 60);
/// The lab's priority beside what is compiled in the background: some thirty times as much.
const PREFERRED: &str = "-15";
/// Boot of a nested guest on a loaded machine, with the image's upload before.
pub(super) const SANDBOX_LIMIT: Duration = Duration::from_secs(5 * 60);

/// A command of the CLI that was just built.
pub(crate) fn basalt(context: &Context, args: &[&str]) -> Command {
    let mut command = Command::new(context.release().join("basalt"));
    command.args(args).current_dir(&context.root);
    command
}

/// Which of the labs: all have the same root image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lab {
    /// The one that everybody uses, at its usual place.
    Default,
    /// One whose host has the newer kernel (lab/newer-kernel), in a newer emulator, beside the other.
    Newer,
    /// One whose emulator is compiled here (lab/fast-emulator), beside the other.
    Fast,
    /// One for the SDKs of E2B, beside the one in which cases run: each emulator takes about one processor.
    Sdks,
    /// One that is killed, stopped and ended over and over, beside the one in which cases run.
    Ended,
}

impl Lab {
    /// Has a program use it.
    pub(super) fn of(self, context: &Context, mut command: Command) -> Command {
        match self {
            Self::Default => (),
            Self::Newer => {
                command.env("BASALT_LAB_STATE", context.cache.join("lab-newer"));
                command.env("BASALT_LAB_KERNEL", "newer");
            }
            Self::Fast => {
                command.env("BASALT_LAB_STATE", context.cache.join("lab-fast"));
                command.env("BASALT_LAB_EMULATOR", "fast");
            }
            Self::Sdks => {
                command.env("BASALT_LAB_STATE", context.cache.join("lab-sdks"));
            }
            Self::Ended => {
                command.env("BASALT_LAB_STATE", context.cache.join("lab-ended"));
            }
        }
        command
    }
}

/// A command of the lab's program that was just built.
pub(crate) fn lab_command(context: &Context, args: &[&str]) -> Command {
    lab_command_in(context, Lab::Default, args)
}

/// The same, of this lab.
pub(super) fn lab_command_in(context: &Context, lab: Lab, args: &[&str]) -> Command {
    let mut command = Command::new(context.release().join("basalt-lab"));
    command.args(args).current_dir(&context.root);
    lab.of(context, command)
}

/// `basalt import`, unless the store has that very image under that name.
pub(crate) fn import(step: &'static str, recipe: Recipe, tag: &'static str) -> Step {
    Step::new(step, move |context, task| {
        let layout = layout(&recipe.path(context)?)?;
        let digest = manifest_digest(Path::new(&layout))?;
        let listed = task
            .run_within(&mut basalt(context, &["images", "--json"]), IMPORT_LIMIT)?
            .out
            .join("\n");
        if has_image(&listed, tag, digest.as_deref()) {
            return Ok(Report {
                cached: true,
                ..Report::default()
            });
        }
        task.run_within(&mut basalt(context, &["import", "--name", tag, &layout]), IMPORT_LIMIT)?;
        Ok(Report::default())
    })
    .hint("`basalt images` shows the store; `basalt import --help` what can be imported")
}

/// A recipe leaves a layout directory, or one archive in its place.
fn layout(made: &Path) -> Result<String> {
    let candidates = [made.to_owned(), made.join("oci"), made.join("oci.tar")];
    let found = candidates
        .iter()
        .find(|path| path.join("oci-layout").exists() || path.is_file());
    let path = found.with_context(|| format!("{} holds neither an OCI layout nor oci.tar", made.display()))?;
    Ok(path.to_string_lossy().into_owned())
}

/// The digest in a layout's index (OCI image-spec, image-layout.md, index.json); an archive is not opened for it.
fn manifest_digest(layout: &Path) -> Result<Option<String>> {
    let path = layout.join("index.json");
    if !path.exists() {
        return Ok(None);
    }
    let index: Value = serde_json::from_slice(&fs::read(&path)?).with_context(|| format!("{}", path.display()))?;
    let digest = index["manifests"][0]["digest"].as_str();
    Ok(Some(
        digest
            .with_context(|| format!("{} names no manifest", path.display()))?
            .to_owned(),
    ))
}

/// Whether the list of images has an entry with this name and this digest, whatever else the entry says.
fn has_image(listed: &str, tag: &str, digest: Option<&str>) -> bool {
    let (Ok(list), Some(digest)) = (serde_json::from_str::<Value>(listed), digest) else {
        return false;
    };
    let entries = list
        .as_array()
        .or_else(|| list["images"].as_array())
        .cloned()
        .unwrap_or_default();
    entries.iter().any(|entry| {
        let text = entry.to_string();
        let named = text.contains(&format!("\"{tag}\"")) || text.contains(&format!("\"{tag}:latest\""));
        named && text.contains(digest)
    })
}

/// The emulated host, if this machine needs it.
pub(crate) fn lab() -> Step {
    Step::new("lab", |context, task| {
        up(context, task, Lab::Default)?;
        Ok(Report::default())
    })
    .plan(only_with_a_lab)
    .hint("`target/release/basalt-lab status` tells more; `basalt-lab down` and the same command start afresh")
}

#[allow(clippy::unnecessary_wraps, reason = "a step's plan may fail")]
pub(super) fn only_with_a_lab(context: &Context) -> Result<Plan> {
    Ok(if context.kvm {
        Plan::NotNeeded("this machine has KVM".into())
    } else {
        Plan::Run
    })
}

/// What `basalt-lab exec` says when its emulator ends, or stands still, under a command.
const HOST_LOST: [&str; 2] = ["the lab ended while the command ran", "the lab stands still"];

/// Whether a command in the lab ended because there is no lab any more (docs/lab.md, traps).
pub(super) fn host_is_lost(finished: &Finished) -> bool {
    let told = |line: &String| HOST_LOST.iter().any(|words| line.contains(words));
    !finished.status.success() && finished.err.iter().any(told)
}

/// Starts a lab in place of the lost one, with the image in it that everything uses.
pub(super) fn another_host(context: &Context, task: &mut Task, lab: Lab) -> Result<()> {
    up(context, task, lab)?;
    answer_in(context, task, lab)?;
    Ok(())
}

/// Ends a lab.
pub(super) fn take_down(context: &Context, task: &mut Task, lab: Lab) -> Result<()> {
    task.run_within(&mut lab_command_in(context, lab, &["down"]), LAB_LIMIT)?;
    Ok(())
}

fn up(context: &Context, task: &mut Task, lab: Lab) -> Result<()> {
    let mut up = lab_command_in(context, lab, &["up", "--fresh"]);
    task.run_within(&mut up, LAB_LIMIT)?;
    prefer(context, task, lab)
}

/// Cases have time limits, and what is compiled in the background is not to be felt. A priority is one within a session where
/// the kernel groups processes by sessions (sched(7), "The autogroup feature"), and the emulator has one of its own: then the
/// session gets the priority. Elsewhere it is enough that the others have the lowest.
fn prefer(context: &Context, task: &mut Task, lab: Lab) -> Result<()> {
    let emulator = emulator(context, task, lab)?;
    let path = format!("/proc/{emulator}/autogroup");
    if !Path::new(&path).exists() {
        return Ok(());
    }
    if let Err(error) = fs::write(&path, PREFERRED) {
        task.say(&format!(
            "the lab has no more of the processors than what is compiled beside it: {path}: {error}"
        ))?;
    }
    Ok(())
}

/// The issue's main job: a sandbox that computes.
pub(crate) fn first_sandbox() -> Step {
    Step::new("first-sandbox", answer).hint("`target/release/basalt doctor` tells what this machine can do")
}

/// A sandbox that computes, and has to say 42.
fn answer(context: &Context, task: &mut Task) -> Result<Report> {
    answer_in(context, task, Lab::Default)
}

pub(super) fn answer_in(context: &Context, task: &mut Task, lab: Lab) -> Result<Report> {
    const SCRIPT: &str = "print(6*7)";
    let command = basalt(context, &["run", "--rm", "python", "--", "python3", "-c", SCRIPT]);
    let mut command = lab.of(context, command);
    let finished = task.run_within(&mut command, SANDBOX_LIMIT)?;
    if finished.out != ["42"] {
        bail!("the sandbox printed {:?} instead of 42", finished.out.join("\n"));
    }
    let mut show = vec![
        String::new(),
        format!("$ target/release/basalt run --rm python -- python3 -c '{SCRIPT}'"),
    ];
    show.extend(finished.err.into_iter().chain(finished.out));
    show.push(String::new());
    Ok(Report {
        show,
        ..Report::default()
    })
}

/// The other images start too: image, command, what it prints.
const OTHER_IMAGES: &[(&str, &[&str], &str)] = &[
    ("redis", &["redis-server", "--version"], "Redis server v="),
    ("node", &["node", "-e", "console.log(6*7)"], "42"),
];

/// A sandbox from each of the images that `make run` does not use.
pub(crate) fn other_images() -> Step {
    Step::new("other-images", |context, task| {
        for (image, command, wanted) in OTHER_IMAGES {
            let mut args = vec!["run", "--rm", image, "--"];
            args.extend(*command);
            let printed = task
                .run_within(&mut basalt(context, &args), SANDBOX_LIMIT)?
                .out
                .join("\n");
            if !printed.starts_with(wanted) {
                bail!("{image} printed {printed:?}, which does not begin with {wanted:?}");
            }
        }
        Ok(Report::default())
    })
}

/// The emulator's process.
pub(super) fn emulator(context: &Context, task: &mut Task, lab: Lab) -> Result<u64> {
    let mut status = lab_command_in(context, lab, &["status", "--json"]);
    let status = task.run_within(&mut status, LAB_LIMIT)?;
    let status: Value = serde_json::from_str(&status.out.join("\n"))?;
    let pid = status["lab"]["pid"].as_u64();
    pid.context("`basalt-lab status` names no process")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_there_only_under_its_name_and_with_its_digest() {
        let list = r#"[{"names":["python"],"digest":"sha256:aa"},{"names":["redis"],"digest":"sha256:bb"}]"#;
        assert!(has_image(list, "python", Some("sha256:aa")));
        assert!(!has_image(list, "python", Some("sha256:bb")));
        assert!(!has_image(list, "node", Some("sha256:aa")));
        assert!(!has_image(list, "python", None));
        assert!(!has_image("", "python", Some("sha256:aa")));
    }

    #[test]
    fn a_layout_is_found_beside_an_archive() {
        let dir = tempfile::tempdir().unwrap();
        assert!(layout(dir.path()).is_err());
        fs::write(dir.path().join("oci.tar"), "").unwrap();
        assert!(layout(dir.path()).unwrap().ends_with("oci.tar"));
        fs::create_dir(dir.path().join("oci")).unwrap();
        fs::write(dir.path().join("oci/oci-layout"), "").unwrap();
        fs::write(
            dir.path().join("oci/index.json"),
            r#"{"manifests":[{"digest":"sha256:cc"}]}"#,
        )
        .unwrap();
        let found = layout(dir.path()).unwrap();
        assert_eq!(manifest_digest(Path::new(&found)).unwrap().unwrap(), "sha256:cc");
    }
}
