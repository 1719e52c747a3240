//! The messages of envd's services, in JSON and in protobuf alike.
//!
//! One of several is on the wire the same as several that may be absent, so that is what it is here:
//! of the fields of such a message at most one is there. Field numbers are those of envd's own
//! description; what is not known is passed over in both forms.

use std::collections::HashMap;
use std::fmt;

use chrono::{DateTime, SecondsFormat, Utc};
use prost::Message;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// A message without anything in it.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
pub(super) struct Empty {}

/// Which process.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ProcessSelector {
    #[prost(uint32, optional, tag = "1")]
    #[serde(deserialize_with = "some_number")]
    pub(super) pid: Option<u32>,
    #[prost(string, optional, tag = "2")]
    pub(super) tag: Option<String>,
}

/// A process as it was asked for.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ProcessConfig {
    #[prost(string, tag = "1")]
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) cmd: String,
    #[prost(string, repeated, tag = "2")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) args: Vec<String>,
    #[prost(map = "string, string", tag = "3")]
    #[serde(skip_serializing_if = "HashMap::is_empty")]
    pub(super) envs: HashMap<String, String>,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cwd: Option<String>,
}

/// The size of a terminal.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct PtySize {
    #[prost(uint32, tag = "1")]
    #[serde(deserialize_with = "number")]
    pub(super) cols: u32,
    #[prost(uint32, tag = "2")]
    #[serde(deserialize_with = "number")]
    pub(super) rows: u32,
}

/// A terminal.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Pty {
    #[prost(message, optional, tag = "1")]
    pub(super) size: Option<PtySize>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct StartRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) process: Option<ProcessConfig>,
    #[prost(message, optional, tag = "2")]
    pub(super) pty: Option<Pty>,
    #[prost(string, optional, tag = "3")]
    pub(super) tag: Option<String>,
    #[prost(bool, optional, tag = "4")]
    pub(super) stdin: Option<bool>,
}

/// A request that names a process and nothing else.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ProcessRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) process: Option<ProcessSelector>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct UpdateRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) process: Option<ProcessSelector>,
    #[prost(message, optional, tag = "2")]
    pub(super) pty: Option<Pty>,
}

/// Input of a process: one of the two.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ProcessInput {
    #[prost(bytes = "vec", optional, tag = "1")]
    #[serde(with = "bytes64")]
    pub(super) stdin: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "2")]
    #[serde(with = "bytes64")]
    pub(super) pty: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct SendInputRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) process: Option<ProcessSelector>,
    #[prost(message, optional, tag = "2")]
    pub(super) input: Option<ProcessInput>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct InputData {
    #[prost(message, optional, tag = "2")]
    pub(super) input: Option<ProcessInput>,
}

/// A step of a stream of input: one of the three.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct StreamInputRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) start: Option<ProcessRequest>,
    #[prost(message, optional, tag = "2")]
    pub(super) data: Option<InputData>,
    #[prost(message, optional, tag = "3")]
    pub(super) keepalive: Option<Empty>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct SendSignalRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) process: Option<ProcessSelector>,
    #[prost(int32, tag = "2")]
    #[serde(deserialize_with = "signal")]
    pub(super) signal: i32,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ProcessInfo {
    #[prost(message, optional, tag = "1")]
    pub(super) config: Option<ProcessConfig>,
    #[prost(uint32, tag = "2")]
    pub(super) pid: u32,
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tag: Option<String>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub(super) processes: Vec<ProcessInfo>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Started {
    #[prost(uint32, tag = "1")]
    pub(super) pid: u32,
}

/// Output of a process: one of the three.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Data {
    #[prost(bytes = "vec", optional, tag = "1")]
    #[serde(with = "bytes64", skip_serializing_if = "Option::is_none")]
    pub(super) stdout: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "2")]
    #[serde(with = "bytes64", skip_serializing_if = "Option::is_none")]
    pub(super) stderr: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "3")]
    #[serde(with = "bytes64", skip_serializing_if = "Option::is_none")]
    pub(super) pty: Option<Vec<u8>>,
}

/// How a process ended.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Ended {
    #[prost(sint32, tag = "1")]
    pub(super) exit_code: i32,
    #[prost(bool, tag = "2")]
    pub(super) exited: bool,
    #[prost(string, tag = "3")]
    pub(super) status: String,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

/// What becomes of a process: one of the four.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ProcessEvent {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) start: Option<Started>,
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<Data>,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) end: Option<Ended>,
    #[prost(message, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) keepalive: Option<Empty>,
}

/// One message of the streams of a process, of `Start` and of `Connect` alike.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ProcessResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) event: Option<ProcessEvent>,
}

/// A request that names a path and nothing else.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct PathRequest {
    #[prost(string, tag = "1")]
    pub(super) path: String,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct MoveRequest {
    #[prost(string, tag = "1")]
    pub(super) source: String,
    #[prost(string, tag = "2")]
    pub(super) destination: String,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ListDirRequest {
    #[prost(string, tag = "1")]
    pub(super) path: String,
    #[prost(uint32, tag = "2")]
    #[serde(deserialize_with = "number")]
    pub(super) depth: u32,
}

/// A moment.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Timestamp {
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(super) nanos: i32,
}

/// What is at a path.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct EntryInfo {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(int32, tag = "2")]
    #[serde(rename = "type", with = "file_type")]
    pub(super) kind: i32,
    #[prost(string, tag = "3")]
    pub(super) path: String,
    #[prost(int64, tag = "4")]
    #[serde(with = "int64")]
    pub(super) size: i64,
    #[prost(uint32, tag = "5")]
    pub(super) mode: u32,
    #[prost(string, tag = "6")]
    pub(super) permissions: String,
    #[prost(string, tag = "7")]
    pub(super) owner: String,
    #[prost(string, tag = "8")]
    pub(super) group: String,
    #[prost(message, optional, tag = "9")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) modified_time: Option<Timestamp>,
    #[prost(string, optional, tag = "10")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) symlink_target: Option<String>,
    #[prost(map = "string, string", tag = "11")]
    #[serde(skip_serializing_if = "HashMap::is_empty")]
    pub(super) metadata: HashMap<String, String>,
}

/// An answer that is an entry and nothing else.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct EntryResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) entry: Option<EntryInfo>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ListDirResponse {
    #[prost(message, repeated, tag = "1")]
    pub(super) entries: Vec<EntryInfo>,
}

/// A request to watch a directory.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct WatchRequest {
    #[prost(string, tag = "1")]
    pub(super) path: String,
    #[prost(bool, tag = "2")]
    pub(super) recursive: bool,
    #[prost(bool, tag = "3")]
    #[serde(alias = "include_entry")]
    pub(super) include_entry: bool,
    #[prost(bool, tag = "4")]
    #[serde(alias = "allow_network_mounts")]
    pub(super) allow_network_mounts: bool,
}

/// Something that happened in a directory.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct FilesystemEvent {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(int32, tag = "2")]
    #[serde(rename = "type", with = "event_type")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) entry: Option<EntryInfo>,
}

/// A step of a watch: one of the three.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct WatchResponse {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) start: Option<Empty>,
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) filesystem: Option<FilesystemEvent>,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) keepalive: Option<Empty>,
}

/// A watcher, as the one who asks it now and then names it.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Watcher {
    #[prost(string, tag = "1")]
    #[serde(alias = "watcher_id")]
    pub(super) watcher_id: String,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct WatcherEvents {
    #[prost(message, repeated, tag = "1")]
    pub(super) events: Vec<FilesystemEvent>,
}

impl From<DateTime<Utc>> for Timestamp {
    fn from(time: DateTime<Utc>) -> Self {
        let nanos = i32::try_from(time.timestamp_subsec_nanos()).unwrap_or_default();
        Self { seconds: time.timestamp(), nanos }
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let nanos = u32::try_from(self.nanos).unwrap_or_default();
        let time = DateTime::from_timestamp(self.seconds, nanos).unwrap_or_default();
        to.serialize_str(&time.to_rfc3339_opts(SecondsFormat::AutoSi, true))
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let time = DateTime::parse_from_rfc3339(&String::deserialize(from)?);
        Ok(time.map_err(de::Error::custom)?.to_utc().into())
    }
}

/// Numbers that may be written as text, as every number of such a message may.
struct Number;

impl Visitor<'_> for Number {
    type Value = i64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an integer")
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<i64, E> {
        i64::try_from(value).map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<i64, E> {
        Ok(value)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<i64, E> {
        value.parse().map_err(E::custom)
    }
}

fn number<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    u32::try_from(from.deserialize_any(Number)?).map_err(de::Error::custom)
}

fn some_number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    number(from).map(Some)
}

/// Names of an enumeration, each at the place of its number.
type Names = [(i32, &'static str)];

fn name_of(names: &Names, value: i32) -> &'static str {
    let found = names.iter().find(|(number, _)| *number == value);
    found.or(names.first()).map_or("", |(_, name)| name)
}

fn read_name<'de, D: Deserializer<'de>>(names: &'static Names, from: D) -> Result<i32, D::Error> {
    struct Name(&'static Names);
    impl Visitor<'_> for Name {
        type Value = i32;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the name of a value")
        }

        fn visit_u64<E: de::Error>(self, value: u64) -> Result<i32, E> {
            i32::try_from(value).map_err(E::custom)
        }

        fn visit_i64<E: de::Error>(self, value: i64) -> Result<i32, E> {
            i32::try_from(value).map_err(E::custom)
        }

        fn visit_str<E: de::Error>(self, value: &str) -> Result<i32, E> {
            let found = self.0.iter().find(|(_, name)| *name == value);
            let unknown = || E::custom(format!("unknown value `{}`", value.escape_debug()));
            found.map(|(number, _)| *number).ok_or_else(unknown)
        }
    }
    from.deserialize_any(Name(names))
}

const SIGNALS: &Names = &[(0, "SIGNAL_UNSPECIFIED"), (9, "SIGNAL_SIGKILL"), (15, "SIGNAL_SIGTERM")];

fn signal<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
    read_name(SIGNALS, from)
}

/// Kinds of what is at a path.
pub(super) mod file_type {
    use super::{Deserializer, Names, Serializer, name_of, read_name};

    pub(in super::super) const UNSPECIFIED: i32 = 0;
    pub(in super::super) const FILE: i32 = 1;
    pub(in super::super) const DIRECTORY: i32 = 2;
    const NAMES: &Names = &[
        (UNSPECIFIED, "FILE_TYPE_UNSPECIFIED"),
        (FILE, "FILE_TYPE_FILE"),
        (DIRECTORY, "FILE_TYPE_DIRECTORY"),
        (3, "FILE_TYPE_SYMLINK"),
    ];

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    pub(super) fn serialize<S: Serializer>(value: &i32, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(name_of(NAMES, *value))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
        read_name(NAMES, from)
    }
}

/// Kinds of what happens in a directory.
pub(super) mod event_type {
    use super::{Deserializer, Names, Serializer, name_of, read_name};

    pub(in super::super) const CREATE: i32 = 1;
    pub(in super::super) const WRITE: i32 = 2;
    pub(in super::super) const REMOVE: i32 = 3;
    pub(in super::super) const RENAME: i32 = 4;
    pub(in super::super) const CHMOD: i32 = 5;
    const NAMES: &Names = &[
        (0, "EVENT_TYPE_UNSPECIFIED"),
        (CREATE, "EVENT_TYPE_CREATE"),
        (WRITE, "EVENT_TYPE_WRITE"),
        (REMOVE, "EVENT_TYPE_REMOVE"),
        (RENAME, "EVENT_TYPE_RENAME"),
        (CHMOD, "EVENT_TYPE_CHMOD"),
    ];

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    pub(super) fn serialize<S: Serializer>(value: &i32, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(name_of(NAMES, *value))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
        read_name(NAMES, from)
    }
}

/// Numbers of 64 bits, which are text in JSON.
mod int64 {
    use super::{Deserializer, Number, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    pub(super) fn serialize<S: Serializer>(value: &i64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
        from.deserialize_any(Number)
    }
}

/// Bytes, which are base64 in JSON.
mod bytes64 {
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};

    use super::{Deserialize as _, Deserializer, Serializer, de};

    #[expect(clippy::ref_option, reason = "serde calls it so")]
    pub(super) fn serialize<S: Serializer>(
        value: &Option<Vec<u8>>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(&STANDARD.encode(value.as_deref().unwrap_or_default()))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Vec<u8>>, D::Error> {
        let text = String::deserialize(from)?;
        // Whoever writes it may use the alphabet of URLs and leave out the padding.
        let plain: String = text
            .trim_end_matches('=')
            .chars()
            .map(|c| match c {
                '-' => '+',
                '_' => '/',
                c => c,
            })
            .collect();
        let bytes = STANDARD_NO_PAD.decode(plain);
        bytes.map(Some).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both<M: Message + Default + PartialEq + fmt::Debug + Serialize + de::DeserializeOwned>(
        message: &M,
        json: &str,
    ) {
        assert_eq!(serde_json::to_string(message).unwrap(), json);
        assert_eq!(&serde_json::from_str::<M>(json).unwrap(), message);
        assert_eq!(&M::decode(&message.encode_to_vec()[..]).unwrap(), message);
    }

    #[test]
    fn messages_are_the_same_in_both_forms() {
        let data = Data { stdout: Some(vec![0xff, 0]), ..Data::default() };
        let event = ProcessEvent { data: Some(data), ..ProcessEvent::default() };
        both(&ProcessResponse { event: Some(event) }, r#"{"event":{"data":{"stdout":"/wA="}}}"#);
        let entry = EntryInfo {
            name: "a".into(),
            kind: file_type::FILE,
            size: 5,
            modified_time: Some(Timestamp { seconds: 1, nanos: 500_000_000 }),
            ..EntryInfo::default()
        };
        both(
            &EntryResponse { entry: Some(entry) },
            r#"{"entry":{"name":"a","type":"FILE_TYPE_FILE","path":"","size":"5","mode":0,"permissions":"","owner":"","group":"","modifiedTime":"1970-01-01T00:00:01.500Z"}}"#,
        );
        let end = Ended { exit_code: -1, status: "signal: killed".into(), ..Ended::default() };
        both(&end, r#"{"exitCode":-1,"exited":false,"status":"signal: killed"}"#);
    }

    #[test]
    fn what_others_write_is_read() {
        let signal = |json| serde_json::from_str::<SendSignalRequest>(json).map(|read| read.signal);
        assert_eq!(signal(r#"{"signal":"SIGNAL_SIGKILL"}"#).unwrap(), 9);
        assert_eq!(signal(r#"{"signal":15,"unknown":[]}"#).unwrap(), 15);
        assert!(signal(r#"{"signal":"SIGHUP"}"#).is_err());
        let selector: ProcessSelector = serde_json::from_str(r#"{"pid":"7"}"#).unwrap();
        assert_eq!(selector.pid, Some(7));
        let input: ProcessInput = serde_json::from_str(r#"{"stdin":"_wA"}"#).unwrap();
        assert_eq!(input.stdin, Some(vec![0xff, 0]));
        assert!(serde_json::from_str::<ProcessInput>(r#"{"stdin":"*"}"#).is_err());
        let watcher: Watcher = serde_json::from_str(r#"{"watcher_id":"w"}"#).unwrap();
        assert_eq!(watcher.watcher_id, "w");
        // As another implementation packs it: pid 300, then a field that is not known here.
        assert_eq!(ProcessSelector::decode(&[8, 0xac, 2, 0x78, 1][..]).unwrap().pid, Some(300));
    }
}
