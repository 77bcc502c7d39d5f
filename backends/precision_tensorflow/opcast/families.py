"""Which op family each TensorFlow op type belongs to: TensorFlow's half of the one table in ``precision.ops``.

An op type with floating inputs or outputs is in exactly one of ``FAMILY``, ``ENTERED`` and (by name or pattern) ``OPAQUE``.
"""

from __future__ import annotations

import functools
import re


def _table(**families: str) -> dict[str, str]:
    return {name: family for family, names in families.items() for name in names.split()}


FAMILY: dict[str, str] = _table(
    matmul="MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum",
    conv="""
        Conv Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv2DBackpropFilterV2 Conv2DBackpropInputV2 Conv3D
        Conv3DBackpropFilter Conv3DBackpropFilterV2 Conv3DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNative
        DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput FusedPadConv2D FusedResizeAndPadConv2D
    """,
    norm="""
        BatchNormWithGlobalNormalization BatchNormWithGlobalNormalizationGrad FusedBatchNorm FusedBatchNormGrad
        FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 LRN LRNGrad
    """,
    softmax="Softmax LogSoftmax SparseSoftmax",
    loss="SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits CTCLoss CTCLossV2 L2Loss",
    reduction="""
        Sum Mean Prod Cumsum Cumprod CumulativeLogsumexp EuclideanNorm BiasAddGrad AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad
        FractionalAvgPool FractionalAvgPoolGrad ResizeArea ResizeBicubic ResizeBicubicGrad ResizeBilinear ResizeBilinearGrad
        ScaleAndTranslate ScaleAndTranslateGrad SegmentMean SegmentProd SegmentProdV2 SegmentSum SegmentSumV2
        SparseReduceSum SparseReduceSumSparse SparseSegmentMean SparseSegmentMeanGrad SparseSegmentMeanGradV2
        SparseSegmentMeanWithNumSegments SparseSegmentSqrtN SparseSegmentSqrtNGrad SparseSegmentSqrtNGradV2
        SparseSegmentSqrtNWithNumSegments SparseSegmentSum SparseSegmentSumGrad SparseSegmentSumGradV2
        SparseSegmentSumWithNumSegments UnsortedSegmentProd UnsortedSegmentSum CollectiveReduce CollectiveReduceV2
        CollectiveReduceV3 CollectiveReduceScatterV2 CrossReplicaSum NcclAllReduce NcclReduce
    """,
    transcendental="""
        Exp Expm1 Log Log1p Pow Square SquaredDifference Rsqrt RsqrtGrad Reciprocal ReciprocalGrad Inv InvGrad Softplus
        SoftplusGrad Tan Acos Acosh Asin Cosh Sinh Erfinv Ndtri Lgamma Digamma Polygamma Zeta Igamma Igammac IgammaGradA Betainc
        BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Dawsn
        Expint FresnelCos FresnelSin Spence Xlog1py Xlogy RandomGammaGrad
    """,
    linalg="""
        BandedTriangularSolve BatchCholesky BatchCholeskyGrad BatchMatrixDeterminant BatchMatrixInverse BatchMatrixSolve
        BatchMatrixSolveLs BatchMatrixTriangularSolve BatchSelfAdjointEig BatchSelfAdjointEigV2 BatchSvd Cholesky CholeskyGrad
        Eig LogMatrixDeterminant Lu MatrixDeterminant MatrixExponential MatrixInverse MatrixSolve MatrixSolveLs
        MatrixSquareRoot MatrixTriangularSolve Qr SelfAdjointEig SelfAdjointEigV2 Svd TridiagonalMatMul TridiagonalSolve RFFT
        RFFT2D RFFT3D RFFTND IRFFT IRFFT2D IRFFT3D IRFFTND
    """,
    elementwise="""
        Abs AccumulateNV2 Add AddN AddV2 ApproximateEqual Asinh Atan Atan2 Atanh BiasAdd BiasAddV1 Ceil ClipByValue Concat
        ConcatV2 Cos Cross Dilation2D Dilation2DBackpropFilter Dilation2DBackpropInput Div DivNoNan DynamicStitch Elu EluGrad
        Equal Erf Erfc Floor FloorDiv FloorMod Greater GreaterEqual LeakyRelu LeakyReluGrad Less LessEqual MatrixSetDiag
        MatrixSetDiagV2 MatrixSetDiagV3 BatchMatrixSetDiag Maximum Minimum Mod Mul MulNoNan Neg NextAfter NotEqual Pack PadV2
        ParallelConcat ParallelDynamicStitch RealDiv Relu Relu6 Relu6Grad ReluGrad Rint Round Select SelectV2 Selu SeluGrad
        Sigmoid SigmoidGrad Sign Sin Softsign SoftsignGrad Sqrt SqrtGrad Sub Tanh TanhGrad TensorScatterAdd TensorScatterMax
        TensorScatterMin TensorScatterSub TensorScatterUpdate TensorStridedSliceUpdate TruncateDiv TruncateMod
        MaxPoolGrad MaxPoolGradV2 MaxPoolGradGrad MaxPoolGradGradV2 MaxPool3DGrad MaxPool3DGradGrad MaxPoolGradGradWithArgmax
        FractionalMaxPoolGrad InplaceAdd InplaceSub InplaceUpdate ScatterNdNonAliasingAdd SparseConcat SparseDenseCwiseAdd
        SparseDenseCwiseDiv SparseDenseCwiseMul SparseAdd SparseTensorDenseAdd SparseSparseMaximum SparseSparseMinimum
        SparseFillEmptyRows RaggedFillEmptyRows LowerBound UpperBound ListDiff Xdivy
    """,
    shape="""
        ArgMax ArgMin ApproxTopK BatchMatrixBandPart BatchMatrixDiag BatchMatrixDiagPart BatchToSpace BatchToSpaceND BroadcastTo
        CheckNumerics CheckNumericsV2 CollectiveAllToAllV2 CollectiveAllToAllV3 AllToAll CollectiveBcastSend
        CollectiveBcastSendV2 CollectiveGather CollectiveGatherV2 CollectivePermute ConjugateTranspose Copy CopyHost
        DeepCopy DepthToSpace Diag DiagPart DynamicPartition EnsureShape ExpandDims ExtractImagePatches ExtractVolumePatches
        FractionalMaxPool Gather GatherNd GatherV2 GuaranteeConst Identity InTopK InTopKV2 IsFinite IsInf IsNan MatrixBandPart
        MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 Max MaxPool MaxPool3D
        MaxPoolGradWithArgmax MaxPoolV2 MaxPoolWithArgmax Min MirrorPad MirrorPadGrad NcclBroadcast NthElement OnesLike Pad
        PreventGradient RaggedGather RandomCrop RandomShuffle Rank Reshape ResizeNearestNeighbor ResizeNearestNeighborGrad
        Reverse ReverseSequence ReverseV2 Roll ScatterNd SegmentMax SegmentMaxV2 SegmentMin SegmentMinV2 Shape ShapeN Size
        Slice Snapshot SpaceToBatch SpaceToBatchND SpaceToDepth SparseReduceMax SparseReduceMaxSparse SparseReorder SparseSlice
        SparseSliceGrad SparseSplit SparseToDense SparseFillEmptyRowsGrad RaggedFillEmptyRowsGrad SparseAddGrad
        Split SplitV Squeeze StatelessShuffle StopGradient StridedSlice StridedSliceGrad Tile TileGrad TopK TopKV2 Transpose
        Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 Unpack UnsortedSegmentMax UnsortedSegmentMin Where ZerosLike
    """,
)  # fmt: skip
"""Families by op type."""

WHY: dict[str, str] = {
    "Sqrt": "torch.autocast leaves it: it shrinks what it is given", "SqrtGrad": "as Sqrt",
    "Tanh": "bounded; torch.autocast leaves it", "Sigmoid": "bounded; torch.autocast leaves it",
    "Erf": "bounded", "Erfc": "bounded", "Sin": "bounded", "Cos": "bounded", "Atan": "bounded", "Atan2": "bounded",
    "Asinh": "grows slower than its argument", "Atanh": "torch.autocast leaves it",
    "Elu": "torch.autocast leaves it; computed in float32 inside", "Selu": "as Elu", "Softsign": "bounded",
    "TensorScatterAdd": "adds to what it is given, in the widest dtype", "TensorScatterSub": "as TensorScatterAdd",
    "AddN": "few terms, each already rounded", "AccumulateNV2": "as AddN", "ScatterNd": "places values",
    "Max": "picks a value", "Min": "picks a value", "MaxPool": "picks values", "TopKV2": "picks values",
    "Dilation2D": "a maximum of sums", "MaxPoolGrad": "routes a gradient; its inputs meet",
    "UnsortedSegmentMax": "picks values", "Gather": "looks values up", "GatherV2": "looks values up",
    "ResizeNearestNeighbor": "moves values", "DynamicStitch": "moves values that meet in one tensor",
}  # fmt: skip
"""Why an op that computes is left to promote or to follow; those not named move values, or are cheap arithmetic."""

CONTRACTIONS = frozenset(
    n for n, f in FAMILY.items() if f in ("matmul", "conv") and n not in ("FusedPadConv2D", "FusedResizeAndPadConv2D")
)
"""Ops that multiply and accumulate."""

VIEW = frozenset(
    [
        "Identity",
        "Reshape",
        "Squeeze",
        "ExpandDims",
        "Transpose",
        "StopGradient",
        "PreventGradient",
        "EnsureShape",
        "Snapshot",
        "Slice",
        "StridedSlice",
        "BroadcastTo",
        "Tile",
        "CheckNumerics",
        "Split",
        "SplitV",
        "Unpack",
    ]
)
"""Ops whose result shows values of their one floating operand."""

EACH = frozenset(["ShapeN"])
"""Ops whose operands need not agree: each is treated for itself."""

SELECTING = frozenset(
    [
        "Select",
        "SelectV2",
        "Maximum",
        "Minimum",
        "ClipByValue",
        "PadV2",
        "ConcatV2",
        "Concat",
        "Pack",
        "Equal",
        "NotEqual",
        "Less",
        "LessEqual",
        "Greater",
        "GreaterEqual",
        "TensorScatterUpdate",
        "TensorStridedSliceUpdate",
        "MatrixSetDiagV3",
        "DynamicStitch",
        "ParallelDynamicStitch",
        "TensorScatterMax",
        "TensorScatterMin",
    ]
)
"""Ops that give one of their operands: a constant among them is brought into range instead of becoming infinite."""

EXACT = SELECTING | frozenset(
    [
        "Abs",
        "Neg",
        "Relu",
        "Relu6",
        "ReluGrad",
        "Relu6Grad",
        "Sign",
        "Add",
        "AddV2",
        "Sub",
        "Mul",
        "RealDiv",
        "Div",
        "DivNoNan",
        "BiasAdd",
        "Floor",
        "Ceil",
        "Round",
        "Rint",
        "AddN",
        "LeakyReluGrad",
        "MaxPoolGrad",
        "MaxPoolGradV2",
        "MaxPool3DGrad",
        "TruncateDiv",
        "FloorDiv",
        "InplaceUpdate",
        "SparseConcat",
    ]
)
"""Elementwise ops that round at most once whichever way they are computed. The others compute low inputs in float32 and
round their result, as fused kernels do."""

ENTERED: dict[str, str] = {
    "If": "entered, branches agree", "StatelessIf": "entered, branches agree", "Case": "entered, branches agree",
    "StatelessCase": "entered, branches agree", "While": "entered, carries to a fixed point",
    "StatelessWhile": "entered, carries to a fixed point", "PartitionedCall": "entered", "StatefulPartitionedCall": "entered",
    "IdentityN": "each operand for itself; the rule of a custom gradient is kept", "Cast": "an author's cast is obeyed",
    "Const": "takes the dtype of what it meets, if it is one number", "Fill": "as Const",
}  # fmt: skip
"""Op types with a rule of their own in :mod:`precision_tensorflow.opcast`."""

_OPAQUE: list[tuple[str, str]] = [
    (r"(Resource|Sparse|ResourceSparse)?Apply.*|Sdca.*|.*Accumulator.*", "updates a variable in its dtype"),
    ((r"(Resource)?Scatter(Nd)?(Add|Sub|Mul|Div|Max|Min|Update)|ResourceGather(Nd)?|.*Variable.*|Assign.*|StridedSliceAssign"
     r"|ResourceStridedSliceAssign"), "a variable keeps its dtype"),
    (r".*(Dataset|Iterator|Optional).*|DatasetToSingleElement|GetElementAtIndex|.*TensorMap.*|CompressElement|UncompressElement",
     "datasets and maps keep the dtypes they were made with"),
    ((r"TensorArray.*|TensorList.*|Stack.*|Queue.*|Barrier.*|(Ordered)?Map(Stage|Peek|Unstage.*)|Stage.*|Unstage|.*Feed.*|"
     r"Infeed.*|Outfeed.*|Prelinearize.*"), "lists and queues keep the dtype they were made with"),
    ((r".*(Random|Stateful(Standard|Truncated|Uniform)|Truncated?Normal|Multinomial|Uniform|Sampler|Sobol|NonDeterministic).*|"
     r"SampleDistorted.*|ComputeAccidentalHits|K(MC2|means).*|Range|LinSpace|OneHot|Empty|ImmutableConst|TPUDummyInput"),
     "makes or draws values in the dtype it was traced with"),
    ((r".*(PyFunc|RemoteCall|BatchFunction|MapDefun|SymbolicGradient|For|TPUPartitionedCall|CudnnRNN|BlockLSTM|LSTMBlock|GRUBlock)"
     r".*"), "a function or a kernel written for its dtypes"),
    (r".*(Quant|Requant|Dequant).*", "quantised in the dtypes it was traced with"),
    (r".*(TPU|Xla|SparseCore|Minibatch|Embedding|Batch$|Unbatch).*", "a kernel written for its dtypes"),
    (r"Batch|.*Send|.*Recv.*|Send|Recv|CollectiveBcastRecv.*", "what is sent has the dtype that is received"),
    ((r".*(Summary|Debug|Print|Assert|Save|Restore|Parse|Decode|Encode|Serialize|AsString|StringFormat|StringToNumber|Fingerprint|"
     r"LoadAndRemap|Session|Histogram|EditDistance).*"), "files, messages and parsed data have declared dtypes"),
    (r".*(Lookup|HashTable|InitializeTable|BoostedTrees|NearestNeighbors|Bincount|CountSparse|Bucketize|IsotonicRegression).*",
     "tables and counts have declared dtypes"),
    (r"(Ref)?(Enter|Exit|Merge|NextIteration|Switch|Select|Identity)", "control flow of TensorFlow 1"),
    (r"Placeholder.*|FakeParam|ToBool|CheckPinned|.*CompositeTensor.*|WindowOp|Bitcast|Complex|ComplexAbs|Angle|Real|Imag",
     "no floating computation, or one that depends on the bits"),
    (r"Ragged.*|.*Sparse.*", "an index and its values, in the dtypes they were traced with"),
    ((r"Adjust.*|RGBToHSV|HSVToRGB|.*(CropAndResize|Glimpse|BoundingBox|NonMaxSuppression|ImageProjective).*|Audio.*|Mfcc|"
     r"GenerateBoundingBox.*"), "image and sound kernels in float32"),
    (r"CTC.*Decoder|TakeManySparse.*|Conv(ert)To.*", "declared dtypes"),
]  # fmt: skip


@functools.cache
def opaque(op_type: str) -> str | None:
    """Why an op type sees the dtypes it was traced with; None if it is not known to."""
    if op_type in FAMILY or op_type in ENTERED:
        return None
    return next((why for pattern, why in _OPAQUE if re.fullmatch(pattern, op_type)), None)
