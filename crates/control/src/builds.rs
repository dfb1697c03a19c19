//! Templates that tenants build: what is kept of them, and what a store can do with it. A template has a name of its tenant's; each of its
//! builds is what a sandbox was at the end of some steps; a tag leads to one of them. Knows no node: whether there is a machine of a build
//! is `kept`, which whoever keeps it says.
//!
//! ```text
//!  add ──▶ Waiting (files are uploaded) ──▶ begin ──▶ Building ──▶ finish ─┬─▶ Ready, has the tags that were asked for
//!              │ too long                                   │ gateway ends └─▶ Failed
//!              └──▶ gone                                    └──▶ fail_unfinished ──▶ Failed
//!  a build that is ready and has no tag left is of no use: `useless` names it until `forget` says that nothing is kept
//!  of it; what removes it says `retire` before
//! ```

use serde::{Deserialize, Serialize};

use crate::Error;

/// What a tenant calls its builds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// 20 hexadecimal digits.
    pub id: String,
    /// Whose it is.
    pub tenant: String,
    /// What it is called: unique among its tenant's.
    pub name: String,
    /// When it was first asked for: nanoseconds since 1970.
    pub created_ns: u64,
}

/// How far a build is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BuildState {
    /// Nobody has said yet what is to be done.
    Waiting,
    /// Its steps are carried out, or will be.
    Building,
    /// Sandboxes can be made of it.
    Ready,
    /// It came to nothing.
    Failed,
}

/// What commands in sandboxes of a build have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// `NAME=value`, over what it was built on.
    pub env: Vec<String>,
    /// In place of the directory of what it was built on.
    pub workdir: Option<String>,
    /// In place of the user of what it was built on.
    pub user: Option<String>,
}

/// Why a build came to nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// A sentence.
    pub message: String,
    /// In which step: its number from 1 on, `base` or `finalize`.
    pub step: Option<String>,
}

/// How important a line of a log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Least.
    Debug,
    /// What is done, and standard output.
    Info,
    /// Standard error.
    Warn,
    /// What ends a build.
    Error,
}

/// A line of a build's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// When: nanoseconds since 1970.
    pub time_ns: u64,
    /// How important.
    pub level: LogLevel,
    /// Of which step, as in [`Failure`].
    pub step: Option<String>,
    /// The line.
    pub message: String,
}

/// One time that a template was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Build {
    /// A UUID.
    pub id: String,
    /// Which template.
    pub template: String,
    /// Whose.
    pub tenant: String,
    /// How far it is.
    pub state: BuildState,
    /// When it was asked for: nanoseconds since 1970.
    pub created_ns: u64,
    /// When it came to its end.
    pub finished_ns: Option<u64>,
    /// Virtual CPUs, if somebody has said how many, or it is ready.
    pub cpus: Option<u32>,
    /// MiB of memory, likewise.
    pub memory_mib: Option<u64>,
    /// MiB of the disk, when it is ready.
    pub disk_mib: Option<u64>,
    /// The tags that it is to have.
    pub wanted: Vec<String>,
    /// There is a machine of it.
    pub kept: bool,
    /// What commands have in sandboxes of it.
    pub settings: Settings,
    /// Why it failed.
    pub failure: Option<Failure>,
}

/// What leads to a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The tag.
    pub tag: String,
    /// To which build.
    pub build: String,
    /// Since when: nanoseconds since 1970.
    pub assigned_ns: u64,
}

/// What a build is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildName {
    /// Which.
    pub build: String,
    /// The template's name.
    pub template: String,
    /// A tag that leads to it.
    pub tag: String,
}

/// An archive that was uploaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredFile {
    /// Whose.
    pub tenant: String,
    /// 64 hexadecimal digits, which its tenant has chosen.
    pub hash: String,
    /// Its size.
    pub bytes: u64,
    /// When somebody had a use for it: seconds since 1970.
    pub used: u64,
}

/// The templates of tenants, and their tags.
pub trait Templates {
    /// The tenant's template of this name, or this id.
    ///
    /// # Errors
    /// The store failed.
    fn template(&self, tenant: &str, wanted: &str) -> Result<Option<Template>, Error>;

    /// All of a tenant's, the newest first.
    ///
    /// # Errors
    /// The store failed.
    fn templates(&self, tenant: &str) -> Result<Vec<Template>, Error>;

    /// It is not there any more, with its builds; those of which a machine was still kept.
    ///
    /// # Errors
    /// The store failed.
    fn remove_template(&self, template: &str) -> Result<Vec<Build>, Error>;

    /// Its tags, by name.
    ///
    /// # Errors
    /// The store failed.
    fn tags(&self, template: &str) -> Result<Vec<Tag>, Error>;

    /// What a tenant's builds are called, by template and tag.
    ///
    /// # Errors
    /// The store failed.
    fn build_names(&self, tenant: &str) -> Result<Vec<BuildName>, Error>;

    /// They lead to this build of the template from now on, in place of others. False if there is no machine of it, or it is going.
    ///
    /// # Errors
    /// There are too many, or the store failed.
    fn assign_tags(&self, template: &str, build: &str, tags: &[String], now_ns: u64) -> Result<bool, Error>;

    /// They lead to nothing any more; all of them where none is named.
    ///
    /// # Errors
    /// The store failed.
    fn remove_tags(&self, template: &str, tags: Option<&[String]>) -> Result<(), Error>;
}

/// How templates came to be.
pub trait Builds {
    /// A new build of the tenant's template of this name, which is made if there is none, with what `template` says. It is waiting.
    ///
    /// # Errors
    /// The tenant has too many, or the store failed.
    fn add_build(&self, template: &Template, build: &Build) -> Result<Template, Error>;

    /// One of the tenant's.
    ///
    /// # Errors
    /// The store failed.
    fn build(&self, tenant: &str, id: &str) -> Result<Option<Build>, Error>;

    /// All of a template, the newest first.
    ///
    /// # Errors
    /// The store failed.
    fn builds(&self, template: &str) -> Result<Vec<Build>, Error>;

    /// All of a tenant's, the newest first.
    ///
    /// # Errors
    /// The store failed.
    fn all_builds(&self, tenant: &str) -> Result<Vec<Build>, Error>;

    /// One that is waiting is being built. False if it is not waiting.
    ///
    /// # Errors
    /// The store failed.
    fn begin_build(&self, id: &str) -> Result<bool, Error>;

    /// It has come to its end as this says, and one that is ready has the tags that it was to have, but for those that lead to one that
    /// was asked for later. False if it is gone.
    ///
    /// # Errors
    /// The store failed.
    fn finish_build(&self, build: &Build, log: &[LogLine]) -> Result<bool, Error>;

    /// What was written of it when it came to its end.
    ///
    /// # Errors
    /// The store failed.
    fn build_log(&self, id: &str) -> Result<Vec<LogLine>, Error>;

    /// Those that were being built have failed by this; which they are. There may be a machine of each, as nobody knows how far it was.
    ///
    /// # Errors
    /// The store failed.
    fn fail_unfinished(&self, failure: &Failure, now_ns: u64) -> Result<Vec<Build>, Error>;

    /// Those that are waiting since before then are gone, with templates that have no other build.
    ///
    /// # Errors
    /// The store failed.
    fn drop_waiting(&self, before_ns: u64) -> Result<(), Error>;

    /// Those of which a machine is kept and to which no tag leads.
    ///
    /// # Errors
    /// The store failed.
    fn useless(&self) -> Result<Vec<Build>, Error>;

    /// Its machine is going, and no tag can lead to it from now on. False if one does.
    ///
    /// # Errors
    /// The store failed.
    fn retire(&self, id: &str) -> Result<bool, Error>;

    /// No machine is kept of it.
    ///
    /// # Errors
    /// The store failed.
    fn forget(&self, id: &str) -> Result<(), Error>;
}

/// What was uploaded to be copied into templates.
pub trait Files {
    /// It is there, in place of one of the same tenant and hash.
    ///
    /// # Errors
    /// The store failed.
    fn put_file(&self, file: &StoredFile) -> Result<(), Error>;

    /// It is of use now; none if it is not there.
    ///
    /// # Errors
    /// The store failed.
    fn use_file(&self, tenant: &str, hash: &str, now: u64) -> Result<Option<StoredFile>, Error>;

    /// All of a tenant's, or of all, those that were of no use for the longest time first.
    ///
    /// # Errors
    /// The store failed.
    fn files(&self, tenant: Option<&str>) -> Result<Vec<StoredFile>, Error>;

    /// How many of a tenant's there are, and bytes of them, but for one of this hash.
    ///
    /// # Errors
    /// The store failed.
    fn files_total(&self, tenant: &str, but: &str) -> Result<(u64, u64), Error>;

    /// It is not there any more.
    ///
    /// # Errors
    /// The store failed.
    fn remove_file(&self, tenant: &str, hash: &str) -> Result<(), Error>;
}
