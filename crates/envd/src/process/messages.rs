//! The messages of `process.Process`: names and kinds of fields are those of the descriptors in the SDKs (e2b 2.63.0 for Python, 2.51.0
//! for JavaScript). Knows no agent.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::connect::json::{Base64, Number, enumeration, is_default, nullable};
use crate::error::Error;
use crate::memory::Held;

/// An empty request.
#[derive(Default, Deserialize)]
pub(super) struct List {}

/// An empty answer.
#[derive(Default, Serialize)]
pub(crate) struct Empty {}

/// What a process is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct ProcessConfig {
    #[serde(deserialize_with = "nullable", skip_serializing_if = "is_default")]
    pub(super) cmd: String,
    #[serde(deserialize_with = "nullable", skip_serializing_if = "is_default")]
    pub(super) args: Vec<String>,
    #[serde(deserialize_with = "nullable", skip_serializing_if = "is_default")]
    pub(super) envs: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "is_default")]
    pub(super) cwd: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Start {
    #[serde(deserialize_with = "nullable")]
    pub(super) process: ProcessConfig,
    pub(super) pty: Option<Pty>,
    pub(super) tag: Option<String>,
    pub(super) stdin: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pty {
    #[serde(deserialize_with = "nullable")]
    pub(super) size: Size,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Size {
    #[serde(deserialize_with = "nullable")]
    pub(super) cols: Number<u32>,
    #[serde(deserialize_with = "nullable")]
    pub(super) rows: Number<u32>,
}

/// Which process: one of the two.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Selector {
    pid: Option<Number<u32>>,
    tag: Option<String>,
}

/// A selector that selects.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Which {
    Pid(u32),
    Tag(String),
}

impl Selector {
    pub(super) fn which(self) -> Result<Which, Error> {
        match (self.pid, self.tag) {
            (Some(Number(pid)), None) => Ok(Which::Pid(pid)),
            (None, Some(tag)) => Ok(Which::Tag(tag)),
            _ => Err(Error::Invalid(
                "a process is selected by its `pid` or by its `tag`".to_owned(),
            )),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Connect {
    #[serde(deserialize_with = "nullable")]
    pub(super) process: Selector,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Update {
    #[serde(deserialize_with = "nullable")]
    pub(super) process: Selector,
    pub(super) pty: Option<Pty>,
}

/// Input: one of the two.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Input {
    pub(super) stdin: Option<Base64>,
    pub(super) pty: Option<Base64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SendInput {
    #[serde(deserialize_with = "nullable")]
    pub(super) process: Selector,
    #[serde(deserialize_with = "nullable")]
    pub(super) input: Input,
}

/// One of the three.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamInput {
    pub(super) start: Option<StreamStart>,
    pub(super) data: Option<StreamData>,
    pub(super) keepalive: Option<serde::de::IgnoredAny>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamStart {
    #[serde(deserialize_with = "nullable")]
    pub(super) process: Selector,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamData {
    #[serde(deserialize_with = "nullable")]
    pub(super) input: Input,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct CloseStdin {
    #[serde(deserialize_with = "nullable")]
    pub(super) process: Selector,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SendSignal {
    #[serde(deserialize_with = "nullable")]
    pub(super) process: Selector,
    #[serde(deserialize_with = "signal")]
    pub(super) signal: i64,
}

/// The numbers are Linux's.
fn signal<'de, D: Deserializer<'de>>(source: D) -> Result<i64, D::Error> {
    enumeration(
        source,
        &[("SIGNAL_UNSPECIFIED", 0), ("SIGNAL_SIGTERM", 15), ("SIGNAL_SIGKILL", 9)],
    )
}

/// A process that runs.
#[derive(Debug, Serialize)]
pub(super) struct ProcessInfo {
    pub(super) config: ProcessConfig,
    pub(super) pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tag: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Listed {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) processes: Vec<ProcessInfo>,
    /// The memory that they take.
    #[serde(skip)]
    pub(super) _held: Held,
}

/// What `Start` and `Connect` stream.
#[derive(Debug, Serialize)]
pub(super) struct Streamed {
    pub(super) event: Event,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Event {
    Start { pid: u32 },
    Data(Data),
    End(End),
    Keepalive {},
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Data {
    Stdout(Base64),
    Stderr(Base64),
    Pty(Base64),
}

/// How a process ended.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct End {
    #[serde(rename = "exitCode", skip_serializing_if = "is_default")]
    pub(super) exit_code: i32,
    #[serde(skip_serializing_if = "is_default")]
    pub(super) exited: bool,
    pub(super) status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: serde::de::DeserializeOwned>(json: &str) -> T {
        serde_json::from_str(json).unwrap()
    }

    /// As the SDKs send them.
    #[test]
    fn requests_are_understood() {
        let start: Start = read(
            r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","echo"],"envs":{"A":"b"}},"stdin":false,"pty":{"size":{"cols":80,"rows":24}}}"#,
        );
        assert_eq!(start.process.args, ["-l", "-c", "echo"]);
        assert_eq!((start.stdin, start.process.cwd, start.tag), (Some(false), None, None));
        assert_eq!(start.pty.unwrap().size.cols, Number(80));

        let input: SendInput = read(r#"{"process":{"pid":7},"input":{"stdin":"aGk="}}"#);
        assert_eq!(input.process.which().unwrap(), Which::Pid(7));
        assert_eq!(&input.input.stdin.unwrap().0[..], b"hi");

        for signal in ["\"SIGNAL_SIGKILL\"", "9"] {
            let signal: SendSignal = read(&format!(r#"{{"process":{{"tag":"web"}},"signal":{signal}}}"#));
            assert_eq!(signal.signal, 9);
            assert_eq!(signal.process.which().unwrap(), Which::Tag("web".to_owned()));
        }
        let keepalive: StreamInput = read(r#"{"keepalive":{}}"#);
        assert!(keepalive.keepalive.is_some() && keepalive.start.is_none());
    }

    #[test]
    fn a_selector_selects_by_one_thing() {
        for json in ["{}", r#"{"pid":1,"tag":"a"}"#, r#"{"pid":null}"#] {
            assert!(read::<Selector>(json).which().is_err(), "{json}");
        }
        assert!(serde_json::from_str::<Selector>(r#"{"pid":-1}"#).is_err());
    }

    #[test]
    fn events_look_as_the_sdks_want_them() {
        let json = |event| serde_json::to_string(&Streamed { event }).unwrap();
        assert_eq!(json(Event::Start { pid: 7 }), r#"{"event":{"start":{"pid":7}}}"#);
        assert_eq!(json(Event::Keepalive {}), r#"{"event":{"keepalive":{}}}"#);
        let bytes = Base64(bytes::Bytes::from_static(b"hi"));
        assert_eq!(
            json(Event::Data(Data::Pty(bytes))),
            r#"{"event":{"data":{"pty":"aGk="}}}"#
        );
        let end = End {
            exit_code: -1,
            exited: false,
            status: "signal: killed".to_owned(),
            error: Some("signal: killed".to_owned()),
        };
        assert_eq!(
            json(Event::End(end)),
            r#"{"event":{"end":{"exitCode":-1,"status":"signal: killed","error":"signal: killed"}}}"#
        );
    }
}
