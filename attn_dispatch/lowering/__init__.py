"""From the IR to ONNX nodes: what the onnxruntime backend and the exporter share. Needs the extra ``onnx``."""
