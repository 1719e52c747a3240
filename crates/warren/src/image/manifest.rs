//! What an image says of itself: its index, its manifest, its configuration.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Digest, ImageError};

/// The largest index, manifest or configuration that is read.
pub(super) const MAX_DOCUMENT: u64 = 4 << 20;
/// How many indexes may lead to one another.
pub(super) const MAX_INDEXES: usize = 4;
const MAX_LAYERS: usize = 128;

/// What registries are asked for.
pub(super) const MANIFESTS: [&str; 4] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

/// Where a part of an image is and how large it is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    #[serde(default)]
    pub(super) media_type: String,
    pub(super) digest: Digest,
    pub(super) size: u64,
    #[serde(default)]
    pub(super) platform: Option<Platform>,
    #[serde(default)]
    pub(super) annotations: Option<std::collections::BTreeMap<String, String>>,
}

/// What an image runs on.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Platform {
    pub(super) architecture: String,
    pub(super) os: String,
    #[serde(default)]
    pub(super) variant: Option<String>,
}

impl Platform {
    /// Returns what images call the machine that this is.
    pub(super) fn here() -> (&'static str, &'static str) {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        ("linux", architecture)
    }

    fn fits(&self) -> bool {
        let variant = self.variant.as_deref().unwrap_or_default();
        // Later variants of one architecture need what this machine may lack.
        (self.os.as_str(), self.architecture.as_str()) == Self::here()
            && matches!(variant, "" | "v1" | "v8")
    }
}

/// An index or a manifest: which of the two is told by what it has.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(default)]
    schema_version: u32,
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
}

/// What a document of an image leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Another document, for the platform that this is.
    Document(Descriptor),
    /// The image.
    Manifest(Manifest),
}

/// The parts of one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Manifest {
    pub(super) config: Descriptor,
    pub(super) layers: Vec<Descriptor>,
}

/// Reads an index or a manifest. Of an index, the image of this `reference`, if one is given and
/// any is named, and of this platform.
pub(super) fn read(bytes: &[u8], reference: Option<&str>) -> Result<Found, ImageError> {
    let document: Document = parse(bytes, "the manifest")?;
    if document.schema_version != 2 {
        let why = format!("its schema is version {}", document.schema_version);
        return Err(ImageError::refused("the manifest", why));
    }
    if let Some(manifests) = document.manifests {
        return choose(manifests, reference).map(Found::Document);
    }
    let (Some(config), Some(layers)) = (document.config, document.layers) else {
        return Err(ImageError::refused("the manifest", "it names no layers"));
    };
    if layers.len() > MAX_LAYERS {
        let what = "the manifest".to_owned();
        return Err(ImageError::TooLarge { what, limit: MAX_LAYERS as u64, unit: "layers" });
    }
    for layer in &layers {
        let known = layer.media_type.is_empty()
            || layer.media_type.starts_with("application/vnd.oci.image.layer.v1.tar")
            || layer.media_type.starts_with("application/vnd.docker.image.rootfs.diff.tar");
        if !known || layer.media_type.ends_with("+encrypted") {
            let kind = layer.media_type.escape_debug();
            let why = format!("a layer is of the kind `{kind}`, and not a tar archive");
            return Err(ImageError::refused("the manifest", why));
        }
    }
    Ok(Found::Manifest(Manifest { config, layers }))
}

fn choose(
    mut manifests: Vec<Descriptor>,
    reference: Option<&str>,
) -> Result<Descriptor, ImageError> {
    const NAME: &str = "org.opencontainers.image.ref.name";
    if let Some(wanted) = reference {
        let names = |descriptor: &Descriptor| {
            let name = descriptor.annotations.as_ref().and_then(|all| all.get(NAME));
            name.is_some_and(|name| name == wanted)
        };
        manifests.retain(names);
        if manifests.is_empty() {
            let why = "nothing in the index has this name".to_owned();
            return Err(ImageError::NotFound { name: wanted.to_owned(), why });
        }
    }
    let several = manifests.len() > 1;
    let fits = |descriptor: &Descriptor| match &descriptor.platform {
        Some(platform) => platform.fits(),
        None => !several,
    };
    let (os, architecture) = Platform::here();
    match manifests.iter().position(fits) {
        Some(index) => Ok(manifests.swap_remove(index)),
        None if several && manifests.iter().all(|one| one.platform.is_none()) => {
            Err(ImageError::refused("the index", "it holds several images: name one of them"))
        }
        None => Err(ImageError::NotFound {
            name: format!("{os}/{architecture}"),
            why: "the index has none for this platform".to_owned(),
        }),
    }
}

/// The configuration of an image, as far as it matters here.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Config {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    config: Option<Runtime>,
    #[serde(default)]
    rootfs: RootFs,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Vec<Digest>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Runtime {
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    env: Option<Vec<String>>,
    #[serde(default)]
    entrypoint: Option<Vec<String>>,
    #[serde(default)]
    cmd: Option<Vec<String>>,
    #[serde(default)]
    working_dir: Option<String>,
}

/// What an image says how it is to be run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// Variables of the environment.
    pub environment: Vec<(String, String)>,
    /// The user, as a name or a number, with or without a group.
    pub user: Option<String>,
    /// The directory that commands start in.
    pub workdir: Option<PathBuf>,
    /// What runs: the entry point and its arguments.
    pub command: Vec<String>,
}

impl Config {
    /// Reads one, and checks that it is of this platform and names as many layers as the manifest.
    pub(super) fn read(bytes: &[u8], layers: usize) -> Result<Self, ImageError> {
        let config: Self = parse(bytes, "the configuration")?;
        let (os, architecture) = Platform::here();
        for (is, ought) in [(&config.os, os), (&config.architecture, architecture)] {
            if !is.is_empty() && is != ought {
                let why = format!("the image is for `{}`, this host is {ought}", is.escape_debug());
                let name = format!("{os}/{architecture}");
                return Err(ImageError::NotFound { name, why });
            }
        }
        if config.rootfs.diff_ids.len() != layers {
            let count = config.rootfs.diff_ids.len();
            let why = format!("it names {count} layers, the manifest {layers}");
            return Err(ImageError::refused("the configuration", why));
        }
        Ok(config)
    }

    pub(super) fn diff_ids(&self) -> &[Digest] {
        &self.rootfs.diff_ids
    }

    pub(super) fn runtime(&self) -> ImageConfig {
        let runtime = self.config.clone().unwrap_or_default();
        let named = |text: Option<String>| text.filter(|text| !text.is_empty());
        let environment = runtime.env.unwrap_or_default();
        let environment = environment.iter().filter_map(|pair| pair.split_once('='));
        let mut command = runtime.entrypoint.unwrap_or_default();
        command.extend(runtime.cmd.unwrap_or_default());
        ImageConfig {
            environment: environment.map(|(k, v)| (k.to_owned(), v.to_owned())).collect(),
            user: named(runtime.user),
            workdir: named(runtime.working_dir).map(PathBuf::from),
            command,
        }
    }
}

/// Reads JSON that came from outside.
pub(super) fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8], what: &str) -> Result<T, ImageError> {
    serde_json::from_slice(bytes).map_err(|error| ImageError::refused(what, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    fn one(digest: &str, extra: &str) -> String {
        format!(r#"{{"mediaType":"","digest":"{digest}","size":1{extra}}}"#)
    }

    fn platform(os: &str, architecture: &str, variant: &str) -> String {
        format!(
            r#","platform":{{"os":"{os}","architecture":"{architecture}","variant":"{variant}"}}"#
        )
    }

    fn index(manifests: &[String]) -> Vec<u8> {
        format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, manifests.join(",")).into_bytes()
    }

    #[test]
    fn of_an_index_the_image_for_this_machine_is_taken() {
        let (os, architecture) = Platform::here();
        let other = if architecture == "amd64" { "arm64" } else { "amd64" };
        let found = |manifests: &[String], name: Option<&str>| match read(&index(manifests), name) {
            Ok(Found::Document(descriptor)) => Ok(descriptor.digest.as_str().to_owned()),
            Ok(Found::Manifest(_)) => panic!("no manifest"),
            Err(error) => Err(error.to_string()),
        };
        let here = one(B, &platform(os, architecture, ""));
        let there = one(A, &platform(os, other, ""));
        assert_eq!(found(&[there.clone(), here.clone()], None).unwrap(), B);
        assert!(found(&[there], None).unwrap_err().contains("none for this platform"));
        let newer = one(A, &platform(os, architecture, "v9"));
        assert_eq!(found(&[newer, here], None).unwrap(), B);
        assert_eq!(found(&[one(A, "")], None).unwrap(), A, "one without a platform is meant");
        assert!(found(&[one(A, ""), one(B, "")], None).unwrap_err().contains("several"));
        let named = |digest, name: &str| {
            let extra =
                format!(r#","annotations":{{"org.opencontainers.image.ref.name":"{name}"}}"#);
            one(digest, &extra)
        };
        let both = [named(A, "one"), named(B, "two")];
        assert_eq!(found(&both, Some("two")).unwrap(), B);
        assert!(found(&both, Some("three")).unwrap_err().contains("no image `three`"));
        assert!(found(&[], None).unwrap_err().contains("none for this platform"));
    }

    #[test]
    fn what_is_no_manifest_is_refused() {
        let (a, b) = (one(A, ""), one(B, ""));
        let good = format!(r#"{{"schemaVersion":2,"config":{a},"layers":[{b}]}}"#);
        assert!(matches!(read(good.as_bytes(), None).unwrap(), Found::Manifest(_)), "control");
        let many = vec![b.clone(); 129].join(",");
        for (text, why) in [
            (String::new(), "EOF"),
            ("[]".to_owned(), "refused"),
            (good.replace(":2", ":1"), "version 1"),
            (good.replace("sha256:b", "sha256:/"), "64 hexadecimal"),
            (good.replace("\"layers\"", "\"fsLayers\""), "names no layers"),
            (good.replacen("\"size\":1", "\"size\":-1", 1), "refused"),
            (format!(r#"{{"schemaVersion":2,"config":{a},"layers":[{many}]}}"#), "128 layers"),
            (
                good.replace(&b, &b.replace("\"mediaType\":\"\"", "\"mediaType\":\"text/x\"")),
                "not a tar archive",
            ),
        ] {
            let error = read(text.as_bytes(), None).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_configuration_says_how_an_image_is_run() {
        let (os, architecture) = Platform::here();
        let text = format!(
            r#"{{"os":"{os}","architecture":"{architecture}","rootfs":{{"diff_ids":["{A}"]}},
            "config":{{"User":"app","Env":["A=b=c","bad"],"WorkingDir":"/srv","Entrypoint":["x"],"Cmd":["y"]}}}}"#
        );
        let config = Config::read(text.as_bytes(), 1).unwrap();
        assert_eq!(
            config.runtime(),
            ImageConfig {
                environment: vec![("A".to_owned(), "b=c".to_owned())],
                user: Some("app".to_owned()),
                workdir: Some("/srv".into()),
                command: vec!["x".to_owned(), "y".to_owned()],
            }
        );
        assert_eq!(config.diff_ids().len(), 1);
        Config::read(text.as_bytes(), 2).unwrap_err();
        let alien = text.replace(&format!("\"{os}\""), "\"plan9\"");
        let error = Config::read(alien.as_bytes(), 1).unwrap_err();
        assert!(error.to_string().contains("plan9"), "{error}");
        Config::read(br#"{"rootfs":{"diff_ids":null}}"#, 0).unwrap_err();
    }
}
